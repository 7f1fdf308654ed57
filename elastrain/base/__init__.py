"""What every room may import, and what imports nothing of ours: small parts that several rooms need alike.

Torch may never come in: the launcher imports these too.
"""
