"""The output directory: its parts and their commit, what a resumed run finds there."""
