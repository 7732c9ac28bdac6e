// The page: what is chosen, and everything that is shown of it. Which keys are seen and what is refused say the rules.
const INTERFACES_ = { own: "Pythonic", training: "Training", inference: "Inference", two_phase: "Two-phase" };
const OPERATORS_ = { own: "fusion_attention.attention", training: "torch_npu.", inference: "torch_npu.", two_phase: "" };
const VERDICTS = { ok: "Legal", note: "Runs, with a warning", chip: "Computed here; the chip refuses it", refused: "Refused", none: "No call of this interface has this mask" };
const MASKS = { zeros: "zeros", triangle: "triangle", own: "own", none: "none" };
const MODES_ = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, -1];
const MOST = 512;
const x = { mode: 3, packed: false, q_len: [6], kv_len: [8], pre: 3, next: 0, free: { pre: false, next: false }, prefix: [3], prefixed: false, align: "end", mask: "zeros", own: null, api: "training", scale: 16 };
const matrix = new Matrix($("matrix"));
let waiting = false, spoken = 0;
const make = (tag, given = {}, ...children) => { const made = Object.assign(document.createElement(tag), given); made.append(...children); return made; };
const clamp = (n, low, high) => Math.min(Math.max(n, low), high);
// All sequences together stay a picture that is drawn between two frames.
const most = () => (x.packed ? Math.floor((2 * MOST) / Math.max(x.q_len.length, 2)) : MOST);
const ownRows = () => Math.max(...x.q_len), ownKeys = () => (x.mode === 9 ? ownRows() : Math.max(...x.kv_len));
function setting() {
  const read = reads(x.mode), prefixed = x.mode === -1 ? x.prefixed : read.prefix;
  const pre = read.pre && !x.free.pre && !(x.mode === -1 && prefixed) ? x.pre : UNLIMITED_;
  const next = read.next && !x.free.next ? (x.mode === -1 && prefixed ? 0 : x.next) : UNLIMITED_;
  const mask = read.mask ? x.mask : x.mask === "none" ? "none" : "zeros";
  const prefix = prefixed ? x.q_len.map((_, b) => clamp(x.prefix[b] ?? 0, 0, MOST)) : [];
  return settingOf({ mode: x.mode, q_len: x.q_len.slice(), kv_len: x.kv_len.slice(), packed: x.packed, pre, next, prefix, align: x.align, mask: x.mode === -1 ? "zeros" : mask, own: mask === "own" ? x.own : null });
}
// ------------------------------------------------------------------------------------------------------------ choosing
function choose(mode) {
  x.mode = mode;
  const read = reads(mode);
  if (mode === 7 || mode === 8) { if (!x.packed) pack(true); } else if (mode === 5 && x.packed) pack(false);
  if (mode === 1 && x.mask === "zeros") x.mask = "triangle";
  if (mode === 9) { x.mask = "triangle"; x.kv_len = x.kv_len.map((n, b) => Math.max(n, x.q_len[b])); x.api = "inference"; }
  else if (x.api === "inference" && !(mode >= 0 && mode <= 4)) x.api = "training";
  if (mode === -1) x.api = "own"; else if (mode < 9 && x.api === "own") x.api = "training";
  if (!read.mask && x.mask !== "none") x.mask = "zeros";
  if (mode === 7 || mode === 8) x.free = { pre: true, next: false };
  build();
}
function pack(on) {
  x.packed = on;
  if (on && x.q_len.length === 1) { x.q_len = [x.q_len[0], Math.max(x.q_len[0] - 2, 1)]; x.kv_len = [x.kv_len[0], x.kv_len[0]]; }
  if (!on) { x.q_len = x.q_len.slice(0, 1); x.kv_len = x.kv_len.slice(0, 1); }
}
function segments(box, options, chosen, choosing) {
  box.replaceChildren(...options.map(([value, label]) => {
    const on = value === chosen;
    const button = make("button", { type: "button", textContent: label, onclick: () => { choosing(value); box.querySelector('[aria-checked="true"]')?.focus(); } });
    button.setAttribute("role", "radio");
    button.setAttribute("aria-checked", on);
    button.tabIndex = on ? 0 : -1;
    return button;
  }));
  box.onkeydown = (event) => turn(event, box);
}
// Arrow keys move between the buttons of a group, as between radio buttons and tabs.
function turn(event, box) {
  const by = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
  const all = [...box.querySelectorAll("button")], at = all.indexOf(document.activeElement);
  if (!by || at < 0) return;
  event.preventDefault();
  const target = (at + by + all.length) % all.length;
  all[target].click();
  box.querySelectorAll("button")[target]?.focus();
}
function slide(id, label, get, set, low, high, top, disabled = false) {
  const range = make("input", { type: "range", min: low, max: high, step: 1, value: get(), id, disabled });
  const exact = make("input", { type: "number", min: low < 0 ? -top : low, max: top, value: disabled ? "" : get(), disabled });
  if (disabled) exact.placeholder = "∞";
  exact.setAttribute("aria-label", `${label}, exact`);
  const fill = () => range.style.setProperty("--fill", `${(100 * (clamp(range.value, low, high) - low)) / Math.max(high - low, 1)}%`);
  const put = (value, other) => { set(value); other.value = value; fill(); later(); };
  range.oninput = () => put(Number(range.value), exact);
  exact.oninput = () => { const n = Math.trunc(Number(exact.value)); if (exact.value !== "" && Number.isFinite(n)) put(clamp(n, low < 0 ? -top : low, top), range); };
  exact.onblur = () => { exact.value = disabled ? "" : get(); };
  fill();
  return make("div", { className: "slide" }, make("label", { htmlFor: id, textContent: label }), range, exact);
}
function build() {
  const read = reads(x.mode), high = Math.min(x.scale, most());
  for (const list of [x.q_len, x.kv_len]) list.forEach((n, b) => { list[b] = Math.min(n, most()); });
  document.querySelectorAll(".mode").forEach((button) => { const on = Number(button.dataset.mode) === x.mode; button.setAttribute("aria-checked", on); button.tabIndex = on ? 0 : -1; if (on) inView(button); });
  segments($("scale"), [[16, "16"], [64, "64"], [512, "512"]], x.scale, (n) => { x.scale = n; build(); });
  $("items").replaceChildren(...x.q_len.map((_, b) => {
    const box = make("div", { className: "item" });
    if (x.packed) {
      const drop = make("button", { type: "button", className: "drop", textContent: "✕", hidden: x.q_len.length < 2, onclick: () => { for (const list of [x.q_len, x.kv_len, x.prefix]) list.splice(b, 1); build(); } });
      drop.setAttribute("aria-label", `Remove sequence ${b}`);
      box.append(make("div", { className: "head" }, make("span", { textContent: `sequence ${b}` }), drop));
    }
    const shared = x.mode === -1 ? x.prefixed : read.prefix, of = x.packed ? ` of sequence ${b}` : "";
    const one = (name, list, low) => { const row = slide(`${name}${b}`, name, () => list[b] ?? 0, (n) => { list[b] = n; }, low, Math.max(high, list[b] ?? 0), most()); row.querySelector("label").append(make("span", { className: "unseen", textContent: of })); return row; };
    box.append(one("Sq", x.q_len, 1), one("Skv", x.kv_len, 1));
    if (shared) box.append(one("prefix", x.prefix, 0));
    return box;
  }));
  $("packed").checked = x.packed;
  $("more").hidden = !x.packed || x.q_len.length >= 8;
  const prefixed = x.mode === -1 && x.prefixed;
  $("window").hidden = !(read.pre || read.next) || prefixed;
  $("tokens").replaceChildren(...["pre", "next"].filter((name) => read[name]).flatMap((name) => {
    const free = make("input", { type: "checkbox", checked: x.free[name], onchange: (event) => { x.free[name] = event.target.checked; build(); $(`free-${name}`).focus(); }, id: `free-${name}` });
    return [slide(name, name, () => x[name], (n) => { x[name] = n; }, -high, high, MOST, x.free[name]), make("label", { className: "switch free" }, free, make("span", { textContent: "no limit (2147483647)" }))];
  }));
  $("band").hidden = x.mode !== -1;
  $("prefixed").checked = x.prefixed;
  segments($("align"), [["start", "starts ↖"], ["end", "ends ↘"]], x.align, (align) => { x.align = align; build(); });
  $("masking").hidden = x.mode === -1;
  const options = read.mask ? MASKS : { zeros: "compressed", none: "no mask" };
  segments($("mask"), Object.entries(options), x.mask, (mask) => { if (mask === "own") ownFrom(); x.mask = mask; build(); });
  $("hint").textContent = x.mask === "none" ? "The classic mistake: training operators ignore the mode without a mask." : read.mask ? "Click cells of the picture to change the mask." : `Only its shape is read: ${x.mode === 6 ? "3072" : "2048"} × 2048, whatever the lengths.`;
  segments($("apis"), Object.entries(INTERFACES_), x.api, (api) => { x.api = api; build(); });
  [...$("apis").children].forEach((tab, at) => {
    tab.setAttribute("role", "tab");
    tab.id = `tab-${Object.keys(INTERFACES_)[at]}`;
    tab.setAttribute("aria-selected", tab.getAttribute("aria-checked"));
    tab.removeAttribute("aria-checked");
    tab.setAttribute("aria-controls", "panel");
    tab.prepend(make("i", { className: "dot" }));
  });
  $("panel").setAttribute("aria-labelledby", `tab-${x.api}`);
  later();
}
// In the strip alone: scrollIntoView would move the page too.
function inView(button) {
  const strip = $("modes"), left = button.offsetLeft - strip.offsetLeft;
  if (left < strip.scrollLeft || left + button.offsetWidth > strip.scrollLeft + strip.clientWidth) strip.scrollLeft = left - (strip.clientWidth - button.offsetWidth) / 2;
}
function ownFrom() {
  const before = setting();
  x.own = Array.from({ length: MOST }, (_, i) => Array.from({ length: MOST }, (_, j) => (before.mask === "triangle" && j > i ? 1 : before.mask === "own" && before.own?.[i]?.[j] ? 1 : 0)));
}
// ------------------------------------------------------------------------------------------------------------- showing
function later() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => { waiting = false; show(); });
}
function show() {
  const s = setting(), p = picture(s, x.api), found = remarksOn(s, x.api), state = verdictOn(s, x.api);
  const title = x.mode === -1 ? own_band(s).__repr__() : `sparse_mode ${x.mode}: ${NAMES[x.mode]}`;
  $("title").textContent = title;
  $("rule").textContent = RULES[x.mode];
  matrix.visible = p !== null && state !== "refused";
  matrix.fill(s, p ?? picture(s, "own") ?? nothing(s));
  matrix.draw();
  $("refused").hidden = matrix.visible;
  $("refused").firstElementChild.textContent = p ? `${operatorOf(s)} refuses this call` : "No call of this interface has this mask";
  const { seen, empty, cut, hidden } = matrix.counts(), cells = s.q_len.reduce((sum, n, b) => sum + n * s.kv_len[b], 0);
  $("counts").innerHTML = !matrix.visible ? "Nothing is computed." : `<b>${seen}</b> of ${cells} scores (${cells ? ((100 * seen) / cells).toFixed(1) : 0} %)` + (cut ? `, ${cut} removed by the mask` : "") + (empty ? ` · <span class="warn">${empty} row${empty > 1 ? "s see" : " sees"} no key</span>` : "");
  const others = sized(s) ? Object.keys(INTERFACES_).filter((api) => api !== x.api && differs(s, api)) : [];
  $("elsewhere").textContent = others.length ? `Other keys are seen at: ${others.map((api) => INTERFACES_[api]).join(", ")}.` : "";
  $("matrix").setAttribute("aria-label", `${title}: ${matrix.rows} rows by ${matrix.keys} keys, ${matrix.visible ? `${seen} scores seen` : "refused"}${matrix.visible && empty ? `, ${empty} rows see no key` : ""}. Arrow keys read it cell by cell.`);
  showLegend(cut, hidden, p);
  $("formulas").replaceChildren(...(p ? s.q_len.map((_, b) => make("div", {}, make("span", { textContent: s.packed ? `sequence ${b}, row i:  ` : "row i:  " }), formula(p, b))) : []));
  $("formulas").hidden = $("legend").hidden = !matrix.visible;
  if ($("rows").open) showRows(p);
  showCall(s, found, state);
  readOut(s, p);
  save(s);
  clearTimeout(spoken);
  spoken = setTimeout(() => { $("live").textContent = `${matrix.visible ? `${seen} of ${cells} scores seen. ` : ""}${VERDICTS[state]}.`; }, 700);
}
// Whether another interface sees other keys of the same setting; asked of pictures that are small enough to compare.
const sized = (s) => matrix.rows * matrix.keys <= 4096;
function differs(s, api) {
  const p = picture(s, api);
  if (!p || verdictOn(s, api) === "refused" || !matrix.visible) return false;
  const cells = new Uint8Array(matrix.cells.length);
  paintKinds(s, p, cells, matrix.keys);
  return cells.some((kind, at) => kind >= 3 !== matrix.cells[at] >= 3);
}
// Where there is no call at all, no key is seen.
function nothing(s) {
  const zeros = s.q_len.map(() => 0);
  return { q_len: s.q_len, kv_len: s.kv_len, lo: zeros, hi: zeros.map(() => -MOST), prefix: zeros, mask: "" };
}
function showLegend(cut, hidden, p) {
  const shared = p && p.prefix.some((n) => n > 0);
  const all = [[3, "seen"], ...(shared ? [[4, "seen, in the prefix"]] : []), ...(cut ? [[2, "removed by the mask"]] : []), ...(hidden ? [[1, "outside the band"]] : [])];
  $("legend").replaceChildren(...all.map(([kind, label]) => { const mark = make("i"); mark.style.background = colours.kinds[kind]; return make("li", {}, mark, label); }));
}
function operatorOf(s) {
  return x.api === "own" ? OPERATORS_.own : OPERATORS_[x.api] + rulesOf(s, x.api).operator;
}
function showCall(s, found, state) {
  Object.keys(INTERFACES_).forEach((api) => { $(`tab-${api}`).firstChild.className = `dot ${api === x.api ? state : verdictOn(s, api)}`; });
  $("operator").textContent = operatorOf(s);
  $("verdict").textContent = VERDICTS[state];
  $("verdict").className = `verdict ${state}`;
  $("remarks").replaceChildren(...found.map((remark) => {
    const hard = ["meaning", "limit", "doubt"].includes(remark.level);
    const line = make("li", { className: remark.level }, make("b", { textContent: (hard ? `${remark.code} ` : "") + remark.param }), `: expected ${remark.expected}${remark.got ? `, got ${remark.got}` : ""}`);
    if (remark.advice) line.append(make("small", { textContent: remark.advice }));
    return line;
  }));
  const text = call(s, x.api);
  document.querySelector(".code").hidden = text === null;
  const whole = text ? `${text.before}\n${text.call}` : "";
  if ($("code").dataset.text !== whole) { $("code").dataset.text = whole; $("code").innerHTML = coloured(whole); }
}
function coloured(text) {
  const safe = text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  return safe.replace(/("[^"\n]*")|(#[^\n]*)|\b(import|from|for|in|if|else|None|True|False)\b|(?<![\w.])(-?\d+(?:\.\d+)?)\b/g, (all, string, comment, keyword, number) => (string ? `<span class="s">${all}</span>` : comment ? `<span class="c">${all}</span>` : keyword ? `<span class="w">${all}</span>` : number ? `<span class="n">${all}</span>` : all));
}
function place([i, j]) {
  let b = 0, row = i, key = j;
  while (row >= x.q_len[b]) { row -= x.q_len[b]; key -= x.kv_len[b]; b++; }
  return { b, row, key, inside: key >= 0 && key < x.kv_len[b] };
}
function readOut(s, p) {
  let text = "Point at the picture, or focus it and use the arrow keys.";
  if (matrix.cursor && p) {
    const { b, row, key, inside } = place(matrix.cursor), [from, to] = edges_of(p, b, row);
    const kinds = ["", "outside the band", "removed by the mask", "seen", "seen, in the prefix"];
    text = `${x.packed ? `sequence ${b}, ` : ""}row ${row} ${to > from ? `has keys ${from} to ${to - 1} in its band` : "has no key in its band"}` + (inside ? `; key ${key}: ${kinds[matrix.cells[matrix.cursor[0] * matrix.keys + matrix.cursor[1]]]}` : "; this key belongs to another sequence");
  }
  $("readout").textContent = text;
  return text;
}
function showRows(p) {
  if (!p) return;
  const lines = p.q_len.flatMap((rows, b) => Array.from({ length: Math.min(rows, 64) }, (_, i) => [b, i, ...edges_of(p, b, i)]));
  const head = make("tr", {}, ...[x.packed && "sequence", "row", "first key", "last key"].filter(Boolean).map((name) => make("th", { scope: "col", textContent: name })));
  const body = lines.map(([b, i, from, to]) => make("tr", {}, ...[...(x.packed ? [b] : []), i, to > from ? from : "none", to > from ? to - 1 : "none"].map((value) => make("td", { textContent: value }))));
  $("table").replaceChildren(make("table", {}, make("thead", {}, head), make("tbody", {}, ...body)));
  if (Math.max(...p.q_len) > 64) $("table").append("The first 64 rows of each sequence.");
}
// -------------------------------------------------------------------------------------------------------------- places
function save(s) {
  const given = { mode: x.mode === -1 ? "band" : x.mode, q: s.q_len.join(","), kv: s.kv_len.join(","), ...(x.packed && { packed: 1 }), ...(s.pre < UNLIMITED_ && { pre: s.pre }), ...(s.next < UNLIMITED_ && { next: s.next }), ...(s.prefix.length && { prefix: s.prefix.join(",") }), ...(s.align !== "end" && { align: s.align }), ...(s.mask !== "zeros" && { mask: s.mask }), api: x.api };
  if (s.mask === "own") given.own = s.own.slice(0, Math.min(ownRows(), 64)).map((row) => row.slice(0, Math.min(ownKeys(), 64)).join("")).join("/");
  x.link = "#" + new URLSearchParams(given).toString().replaceAll("%2C", ",").replaceAll("%2F", "/");
}
function load(text) {
  const given = new URLSearchParams(text.replace(/^#/, ""));
  const whole = (name, low, high) => (given.get(name) ?? "").split(",").filter(Boolean).map(Number).filter((n) => Number.isInteger(n) && n >= low && n <= high).slice(0, 8);
  const mode = given.get("mode") === "band" ? -1 : Number(given.get("mode") ?? NaN);
  if (!MODES_.includes(mode)) return;
  const q = whole("q", 1, MOST), kv = whole("kv", 1, MOST);
  Object.assign(x, { mode, packed: given.get("packed") === "1" || q.length > 1, q_len: q.length ? q : [6], align: given.get("align") === "start" ? "start" : "end" });
  x.kv_len = x.q_len.map((n, b) => kv[b] ?? n);
  x.prefix = whole("prefix", 0, MOST);
  x.prefixed = x.prefix.length > 0;
  for (const name of ["pre", "next"]) { const [n] = whole(name, -MOST, MOST); x.free[name] = given.get(name) === null || n === undefined; x[name] = n ?? (name === "pre" ? 3 : 0); }
  x.mask = given.get("mask") in MASKS ? given.get("mask") : "zeros";
  if (x.mask === "own") { x.mask = "zeros"; ownFrom(); x.mask = "own"; (given.get("own") ?? "").split("/").slice(0, MOST).forEach((row, i) => [...row].slice(0, MOST).forEach((cell, j) => { x.own[i][j] = cell === "1" ? 1 : 0; })); }
  x.api = given.get("api") in INTERFACES_ ? given.get("api") : mode === 9 ? "inference" : mode === -1 ? "own" : "training";
  x.scale = [16, 64, 512].find((n) => n >= Math.max(...x.q_len, ...x.kv_len)) ?? 512;
}
function theme(name) {
  document.documentElement.dataset.theme = name;
  readColours();
  document.querySelectorAll(".mode").forEach((button) => thumbnail(button.firstChild, settingOf(EXAMPLES[button.dataset.mode]), { 9: "inference", "-1": "own" }[button.dataset.mode] ?? "training"));
  later();
}
function kept(value) {
  try { if (value === undefined) return localStorage.getItem("fa-theme"); localStorage.setItem("fa-theme", value); } catch { /* a page from a file may keep nothing */ }
  return null;
}
function dark() {
  const name = document.documentElement.dataset.theme;
  return name === "auto" ? matchMedia("(prefers-color-scheme: dark)").matches : name === "dark";
}
// In a page of the documentation: its light or dark, and nothing of our own above the modes.
function embed() {
  if (window === parent && !/[#&?]embed/.test(location.href)) return;
  document.body.classList.add("embedded");
  try {
    const frame = window.frameElement;
    if (frame) new ResizeObserver(() => { frame.style.height = `${document.body.offsetHeight}px`; }).observe(document.body);
    const host = parent.document.body, follow = () => theme(host.dataset.mdColorScheme === "slate" ? "dark" : "light");
    if (host.dataset.mdColorScheme) { follow(); new MutationObserver(follow).observe(host, { attributeFilter: ["data-md-color-scheme"] }); }
  } catch { /* another origin: the system's preference holds */ }
}
// --------------------------------------------------------------------------------------------------------------- start
function paint(place_, to) {
  if (!place_.inside) return;
  const j = x.mode === 9 ? place_.key - (x.kv_len[place_.b] - x.q_len[place_.b]) : place_.key;
  if (j < 0) return;
  if (x.mask !== "own") { ownFrom(); x.mask = "own"; build(); }
  x.own[place_.row][j] = to ?? 1 - x.own[place_.row][j];
  later();
}
function start() {
  readColours();
  $("modes").replaceChildren(...MODES_.map((mode) => {
    const button = make("button", { type: "button", className: "mode", onclick: () => choose(mode) }, make("canvas"), make("b", { textContent: mode < 0 ? "Band" : mode }), make("span", { textContent: mode < 0 ? "our own words" : NAMES[mode] }));
    button.firstChild.setAttribute("aria-hidden", "true");
    button.dataset.mode = mode;
    button.setAttribute("role", "radio");
    return button;
  }));
  $("modes").onkeydown = (event) => turn(event, $("modes"));
  $("packed").onchange = (event) => { pack(event.target.checked); build(); };
  $("more").onclick = () => { x.q_len.push(x.q_len.at(-1)); x.kv_len.push(x.kv_len.at(-1)); x.prefix.push(0); build(); };
  $("prefixed").onchange = (event) => { x.prefixed = event.target.checked; build(); };
  $("rows").ontoggle = later;
  $("theme").onclick = () => { const name = dark() ? "light" : "dark"; kept(name); theme(name); };
  const copy = async (button, text) => { const before = button.textContent; try { await navigator.clipboard.writeText(text); button.textContent = "Copied"; } catch { button.textContent = "Not allowed"; } setTimeout(() => { button.textContent = before; }, 1200); };
  $("copy").onclick = () => copy($("copy"), $("code").dataset.text);
  $("share").onclick = () => { try { history.replaceState(null, "", x.link); } catch { location.hash = x.link; } copy($("share"), location.href); };
  let painting = null;
  const over = (event) => {
    const at = matrix.at(event);
    matrix.cursor = at;
    if (at && painting !== null) paint(place(at), painting);
    later();
  };
  $("matrix").onpointermove = over;
  $("matrix").onpointerleave = () => { matrix.cursor = null; later(); };
  $("matrix").onpointerdown = (event) => {
    const at = matrix.at(event);
    matrix.cursor = at;
    if (!at || !reads(x.mode).mask || x.mask === "none") return;
    if (place(at).inside) { painting = matrix.cells[at[0] * matrix.keys + at[1]] === 2 ? 0 : 1; paint(place(at), painting); }
  };
  addEventListener("pointerup", () => { painting = null; });
  $("matrix").onkeydown = (event) => {
    const by = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] }[event.key];
    if (by) {
      const [i, j] = matrix.cursor ?? [-by[0], -by[1]];
      matrix.cursor = [clamp(i + by[0], 0, matrix.rows - 1), clamp(j + by[1], 0, matrix.keys - 1)];
    } else if (event.key === " " && matrix.cursor && reads(x.mode).mask && x.mask !== "none") paint(place(matrix.cursor));
    else return;
    event.preventDefault();
    const s = setting();
    clearTimeout(spoken);
    show();
    clearTimeout(spoken);
    $("live").textContent = readOut(s, picture(s, x.api));
  };
  addEventListener("hashchange", () => { load(location.hash); build(); });
  addEventListener("resize", later);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => theme(document.documentElement.dataset.theme));
  load(location.hash);
  build();
  theme(kept() ?? "auto");
  embed();
  show();
  requestAnimationFrame(() => performance.mark("first picture"));
}
start();
