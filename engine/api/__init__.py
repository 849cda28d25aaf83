"""What other processes may import from the engine: messages, parameters, configuration, hashing.

Nothing below this package imports torch, transformers or cupy (a test checks it).
"""
