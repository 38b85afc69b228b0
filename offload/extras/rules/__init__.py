"""Update rules beside AdamW and SGD: Lion, Adafactor, LOMO, AdaLomo and Muon."""
