"""The plan of a run: forecasts before the first step."""
