// Pictures of a guide are links to themselves, so that a phone can show them alone and enlarge them.
for (const image of document.querySelectorAll(".md-content p > img:only-child")) {
  const link = document.createElement("a");
  link.href = image.src;
  image.replaceWith(link);
  link.append(image);
}

// The quartiles of a benchmark stay on one line, unless the table has so many columns that it would become too wide.
for (const cell of document.querySelectorAll(".md-content tr:not(:has(:nth-child(7))) td:not(:has(*))")) {
  cell.textContent = cell.textContent.replace(/\([\d.,]+ to [\d.,]+\)$/, (range) => range.replaceAll(" ", "\u00a0"));
}
