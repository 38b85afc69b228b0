"""How parameters lie in flat buffers, and which rank owns which range."""
