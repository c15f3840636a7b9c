// A choice of versions above the list of pages, where a site has several. It needs no server.
addEventListener("DOMContentLoaded", () => {
  if (!window.siteVersions) return;
  const { current, pages } = window.siteVersions;
  const root = new URL(document.documentElement.dataset.content_root, location.href);
  const page = location.href.split(/[?#]/)[0].slice(root.href.length) || "index.html";
  const choice = document.createElement("select");
  choice.className = "site-versions";
  choice.setAttribute("aria-label", "Version");
  for (const version of Object.keys(pages)) choice.add(new Option(version, version, false, version === current));
  choice.onchange = () => {
    const there = pages[choice.value].includes(page) ? page : "index.html";
    location.href = new URL(`../${choice.value}/${there}`, root);
  };
  document.querySelector(".sidebar-brand").after(choice);
});
