"""Files here, in an object store and on the Hugging Face Hub; locks; files seen whole.

May import: errors, console.
"""
