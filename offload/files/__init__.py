"""Folders appearing complete or not at all, and files for the nvme tier."""
