"""``python -m batchinfer``: the same as the ``batchinfer`` program."""

from batchinfer.cli import main

if __name__ == "__main__":
    main()
