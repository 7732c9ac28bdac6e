"""`python -m fusion_attention.cli` runs the command `fusion-attention`."""

from fusion_attention.cli import main

main()
