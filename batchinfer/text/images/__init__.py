"""Images of prompts: finds them in rows, reads their files, and prepares them for vision towers.

Tokenizing a prompt requires only the size of each image, which is in the image's header
(``image_placeholders``). The pixels are decoded later, shortly before the engine needs them
(``pixels``).
"""
