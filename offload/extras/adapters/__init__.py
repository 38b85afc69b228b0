"""PEFT adapters over a frozen base: training, restarts, export."""
