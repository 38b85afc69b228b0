"""Forecast memory use and step time before anything is allocated."""
