"""Lists the tables of all pages."""

from clauses import (
    block_sparse_attention,
    compressor,
    dense_indexer,
    flash_attention_score_v2,
    incre_flash_attention_v4,
    indexer_grad_kl_loss,
    indexer_v2,
    score_grad_v4,
    score_v4,
    softmax_l1_norm,
    sparse_flash_attention_grad,
    sparse_flash_mla,
    sparse_flash_mla_grad,
    sparse_lightning_indexer_kl_loss_grad,
    unpadding_score_grad_v3,
)
from clauses.checks import Page

PAGES: tuple[Page, ...] = (
    unpadding_score_grad_v3.PAGE,
    sparse_flash_attention_grad.PAGE,
    flash_attention_score_v2.PAGE,
    incre_flash_attention_v4.PAGE,
    indexer_grad_kl_loss.PAGE,
    sparse_flash_mla.PAGE,
    sparse_lightning_indexer_kl_loss_grad.PAGE,
    sparse_flash_mla_grad.PAGE,
    softmax_l1_norm.PAGE,
    dense_indexer.PAGE,
    dense_indexer.LSE_PAGE,
    indexer_v2.PAGE,
    compressor.PAGE,
    compressor.GRAD_PAGE,
    block_sparse_attention.PAGE,
    block_sparse_attention.GRAD_PAGE,
    score_v4.PAGE,
    score_grad_v4.PAGE,
)
