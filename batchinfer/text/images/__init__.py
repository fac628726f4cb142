"""Images of prompts: finds them in rows, reads their files, and prepares them for vision towers.

A prompt's tokens need only the size of each image, which its header gives (``row_images``). The
pixels are decoded later, shortly before the engine needs them (``pixels``).
"""
