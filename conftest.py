"""Research packages lie in folders of their own names at the root. pytest names test modules after their folders, so a
package would be hidden by its folder if it were not imported before."""

import forge_plugins_moe  # noqa: F401
