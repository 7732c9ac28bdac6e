// Formulas, drawn by the KaTeX that lies beside this file: Markdown leaves them as \( ... \) and \[ ... \].
document$.subscribe(() => {
  for (const place of document.querySelectorAll(".arithmatex")) {
    const text = place.textContent.trim()
    katex.render(text.slice(2, -2), place, { displayMode: text.startsWith("\\["), throwOnError: false })
  }
})

// The explorer shows what an address of its page says: explorer.html#mode=4&q=5&kv=8&pre=2&next=1
document$.subscribe(() => {
  const frame = document.querySelector("iframe.fa-explorer")
  if (frame && location.hash.includes("mode=")) frame.src = frame.src.split("#")[0] + location.hash
})
