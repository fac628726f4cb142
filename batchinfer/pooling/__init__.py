"""What a folder says of embeddings and labels, and hidden states made into them.

May import: config, errors, text.
"""
