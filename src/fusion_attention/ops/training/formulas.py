"""Formulas of training attention and its gradients, as plain text and in TeX, for the documentation."""

FORWARD_FORMULA = """S   = scale * (Q K^T + pse)                 pse_type 1; the others add after scaling
P   = exp(S - max) / sum                    over the keys that mask, window and prefix leave
out = (P * keep / keep_prob) V"""
FORWARD_TEX = r"""\begin{aligned}
S &= \begin{cases} s\,(QK^\top + pse) & \text{pse\_type } 1 \\ s\,QK^\top + pse & \text{else} \end{cases} \\
P_{ij} &= \frac{e^{S_{ij} - m_i}}{\ell_i}, \quad m_i = \max_j S_{ij}, \quad \ell_i = \sum_j e^{S_{ij} - m_i},
  \quad j \text{ over the keys that row } i \text{ sees} \\
out &= \frac{P \odot keep}{p_{keep}}\, V
\end{aligned}"""
BACKWARD_FORMULA = """P  = exp(S - max) / sum                     from the saved statistics
dV = (P * keep / keep_prob)^T dY
dS = P * ((dY V^T) * keep / keep_prob - rowsum(dY * out))
dQ = scale * dS K        dK = scale * dS^T Q        dpse = dS (pse_type 0) or scale * dS (pse_type 1)"""
BACKWARD_TEX = r"""\begin{aligned}
P_{ij} &= \frac{e^{S_{ij} - m_i}}{\ell_i} \quad \text{from the saved } m \text{ and } \ell \\
dV &= \Big(\frac{P \odot keep}{p_{keep}}\Big)^{\!\top} dY \\
dS &= P \odot \Big(\frac{dY\,V^\top \odot keep}{p_{keep}} - \operatorname{rowsum}(dY \odot out)\Big) \\
dQ &= s\, dS\, K, \qquad dK = s\, dS^\top Q, \qquad dpse =
  \begin{cases} s\, dS & \text{pse\_type } 1 \\ dS & \text{else} \end{cases}
\end{aligned}"""
