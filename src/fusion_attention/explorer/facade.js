// The rules as the page asks them: what stands above is translated from Python.
const UNLIMITED_ = 2147483647;
const rulesOf = (s, api) => ASKED[api][s.packed ? 1 : 0];
function remarksOn(s, api) {
  const known = as_mode(s);
  if (api === "own" || known === null) return [];
  const asked = rulesOf(s, api);
  return remarks(asked.rules, names_of(known, api), s.packed ? "TND" : "BSND", asked.spelled);
}
function verdictOn(s, api) {
  if (picture(s, api) === null) return "none";
  return verdict(remarksOn(s, api));
}
function settingOf(x) {
  return new Setting(x.mode, x.q_len, x.kv_len, x.packed, x.pre, x.next, py.tuple(x.prefix), x.align, x.mask, x.own);
}
// Kinds of cells, as explorer/draw.py numbers them, into `cells` (Uint8Array, all sequences one behind the other).
function paintKinds(s, p, cells, keys) {
  cells.fill(0);
  let row = 0, first = 0;
  for (let b = 0; b < p.q_len.length; b++) {
    for (let i = 0; i < p.q_len[b]; i++) {
      const at = (row + i) * keys + first;
      const [from, to] = edges_of(p, b, i);
      cells.fill(1, at, at + p.kv_len[b]);
      if (to <= from) continue;
      cells.fill(3, at + from, at + to);
      const shared = Math.min(p.prefix[b], to);
      if (shared > from) cells.fill(4, at + from, at + shared);
      if (p.mask === "") continue;
      const [last, start, own] = mask_row(s, p.mask, b, i);
      if (last < to) cells.fill(2, at + Math.max(last, from), at + to);
      for (let j = Math.max(from, start); j < Math.min(to, start + own.length); j++) if (own[j - start]) cells[at + j] = 2;
    }
    row += p.q_len[b];
    first += p.kv_len[b];
  }
}
