"""Small parts that every package may import, and that import nothing else of elastrain.

Never imports torch, because the launcher imports these modules too.
"""
