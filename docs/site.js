// Pictures of a guide are links to themselves, so that a phone can show them alone and enlarge them.
for (const image of document.querySelectorAll(".md-content p > img:only-child")) {
  const link = document.createElement("a");
  link.href = image.src;
  image.replaceWith(link);
  link.append(image);
}

// The quartiles of a benchmark stay on one line. On a wide screen, tables of many columns would then no longer fit; on a
// phone they scroll.
const limit = matchMedia("(min-width: 45em)").matches ? 6 : Infinity;
for (const cell of document.querySelectorAll(".md-content td:not(:has(*))")) {
  if (cell.parentElement.cells.length > limit) continue;
  cell.textContent = cell.textContent.replace(/\([\d.,]+ to [\d.,]+\)$/, (range) => range.replaceAll(" ", "\u00a0"));
}
