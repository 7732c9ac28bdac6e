"""`python -m fusion_attention.cli` is `fusion-attention`."""

from fusion_attention.cli import main

main()
