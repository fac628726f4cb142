"""Vision towers: their weights, and the embeddings of images."""
