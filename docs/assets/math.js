// Formulas, drawn by the KaTeX that lies beside this file: Markdown leaves them as \( ... \) and \[ ... \].
document$.subscribe(() => {
  for (const place of document.querySelectorAll(".arithmatex")) {
    const text = place.textContent.trim()
    katex.render(text.slice(2, -2), place, { displayMode: text.startsWith("\\["), throwOnError: false })
  }
})
