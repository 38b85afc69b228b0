"""Contrastive learning: a model of text embeddings, from queries, their answers and hard negatives."""
