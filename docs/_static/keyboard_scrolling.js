// What is wider than its place can be scrolled by keys, once it can have the focus.
const reach = () => {
  for (const one of document.querySelectorAll("pre, .table-wrapper"))
    if (one.scrollWidth > one.clientWidth) one.tabIndex = 0;
};
addEventListener("load", reach);
addEventListener("resize", reach);
