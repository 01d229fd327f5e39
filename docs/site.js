// Pictures of a guide are links to themselves, so that a phone can show them alone and enlarge them.
for (const image of document.querySelectorAll(".md-content p > img:only-child")) {
  const link = document.createElement("a");
  link.href = image.src;
  image.replaceWith(link);
  link.append(image);
}
