"""Define the command lines `experiential-train` and `experiential`.

Heavy imports happen inside the commands that need them.
"""
