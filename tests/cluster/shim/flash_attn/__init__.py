"""Stands where flash-attn would: OpenRLHF imports three of its functions and calls them only for
packed samples and ring attention.
"""

__version__ = "0.0.0"
