"""Members on several hosts: what does it spare to sum on each host first?"""
