"""Records of finished files: their sizes, hashes and counts, by which damage is noticed."""
