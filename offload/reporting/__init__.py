"""One page about a run, or about several: read from run folders, worked out, drawn."""
