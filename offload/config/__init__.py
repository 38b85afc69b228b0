"""The configuration: sections, their defaults and checks, presets, and the command line that fills them."""
