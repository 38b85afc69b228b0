"""Folders that are whole or not there, and the files of the nvme tier."""
