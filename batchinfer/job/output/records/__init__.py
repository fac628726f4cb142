"""Records of finished files. The recorded sizes, hashes and counts reveal damaged files."""
