"""Forecast memory use and step time of a run before anything is allocated."""
