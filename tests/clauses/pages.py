"""The pages of CANN that are tables here."""

from clauses import (
    block_sparse_attention,
    compressor,
    dense_indexer,
    flash_attention_score_v2,
    incre_flash_attention_v4,
    indexer_grad_kl_loss,
    indexer_kl_loss_grad,
    indexer_v2,
    score_grad_v4,
    score_v4,
    softmax_l1_norm,
    sparse_flash_attention_grad,
    sparse_flash_mla,
    sparse_flash_mla_grad,
    unpadding_score_grad_v3,
)
from clauses.table import Page

# Each page, and how many of its calls and parameters are checked at least.
PAGES: dict[Page, int] = {
    unpadding_score_grad_v3.PAGE: 221,
    sparse_flash_attention_grad.PAGE: 178,
    flash_attention_score_v2.PAGE: 219,
    incre_flash_attention_v4.PAGE: 245,
    indexer_grad_kl_loss.PAGE: 151,
    sparse_flash_mla.PAGE: 180,
    indexer_kl_loss_grad.PAGE: 150,
    sparse_flash_mla_grad.PAGE: 128,
    softmax_l1_norm.PAGE: 87,
    dense_indexer.PAGE: 222,
    dense_indexer.LSE_PAGE: 167,
    indexer_v2.PAGE: 93,
    compressor.PAGE: 91,
    compressor.GRAD_PAGE: 102,
    block_sparse_attention.PAGE: 85,
    block_sparse_attention.GRAD_PAGE: 101,
    score_v4.PAGE: 379,
    score_grad_v4.PAGE: 290,
}
