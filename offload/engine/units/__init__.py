"""Units (modules with jointly moved parameters): forward, saved activations and recomputation."""
