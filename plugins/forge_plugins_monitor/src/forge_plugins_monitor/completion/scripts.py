"""What a shell is told: a function that asks ``forge`` for the words that may stand at the cursor.

The line up to the cursor goes in by ``COMP_LINE``. One word a line comes back. Bash gets what it is to put behind the
last character that breaks words for it (``COMP_WORDBREAKS``), with the space that follows, if one does; so old versions
serve. zsh and fish get a word, a tab, and what it is; zsh also ``plain`` or ``open`` in front, which says whether a
space follows.
"""

from __future__ import annotations

BASH = """\
# Completion of forge for bash. Written by forge --install-completion.
_forge_completion() {
    local IFS=$'\\n'
    COMPREPLY=($(COMP_LINE="${COMP_LINE:0:COMP_POINT}" COMP_WORDBREAKS="$COMP_WORDBREAKS" \\
        "$1" completion bash --words 2> /dev/null))
}
complete -o nospace -o nosort -F _forge_completion forge 2> /dev/null || complete -o nospace -F _forge_completion forge
"""
ZSH = """\
#compdef forge
# Completion of forge for zsh. Written by forge --install-completion.
_forge_completion() {
    local type word about
    local -a plain plain_about open open_about
    while IFS=$'\\t' read -r type word about; do
        if [[ $type == open ]]; then
            open+=("$word")
            open_about+=("$word${about:+  $about}")
        else
            plain+=("$word")
            plain_about+=("$word${about:+  $about}")
        fi
    done < <(COMP_LINE="${(j: :)words[1,CURRENT-1]} $PREFIX" "$words[1]" completion zsh --words 2> /dev/null)
    (( $#plain )) && compadd -V plain -l -d plain_about -a plain
    (( $#open )) && compadd -V open -S '' -l -d open_about -a open
}
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit; }
compdef _forge_completion forge
"""
FISH = """\
# Completion of forge for fish. Written by forge --install-completion.
function __forge_completion
    set -lx COMP_LINE (commandline --cut-at-cursor --current-process | string collect)
    forge completion fish --words 2> /dev/null
end
complete --command forge --no-files --keep-order --arguments '(__forge_completion)'
"""
SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}
"""By shell."""
