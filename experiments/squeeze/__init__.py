"""At a memory limit where the undisturbed plan just fits: how many losses are survived?"""
