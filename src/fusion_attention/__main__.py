"""`python -m fusion_attention` is `fusion-attention`."""

from fusion_attention.cli import main

main()
