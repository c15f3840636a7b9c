// The versions beside this one. `python docs/versions.py` writes them here, once a site has several.
window.siteVersions = null;
