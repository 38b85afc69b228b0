"""The passes before the first step, which learn what a step relies on."""
