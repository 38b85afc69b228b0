"""Large models and long sequences: experts fetched one by one, weights in row blocks, tiles of a sequence, sequences
shared by ranks, compiled blocks.
"""
