#!/bin/bash
# unpack_slurm.sh FOLDER: Debian's Slurm, downloaded and unpacked, not installed. Any user may do it; 3 MB, seconds.
set -euo pipefail
packages="slurmctld slurmd slurm-client slurm-wlm-basic-plugins libmunge2 libhwloc15 liblua5.1-0"
mkdir -p "$1"
folder=$(cd "$1" && pwd)
exec 9>"$folder/.lock" && flock 9 # two test processes may want it at the same time
[ ! -x "$folder/usr/sbin/slurmctld" ] || exit 0
work=$(mktemp -d "$folder/.unpacking-XXXXXX")
trap 'rm -rf "$work"' EXIT
cd "$work"
# shellcheck disable=SC2086
if ! apt-get -q download $packages 2>/dev/null; then # no lists yet, and an ordinary user cannot fetch the system's
    mkdir -p apt/lists/partial apt/cache/archives/partial
    own="-o Dir::State::Lists=$work/apt/lists -o Dir::Cache=$work/apt/cache"
    apt-get -q $own update
    apt-get -q $own download $packages
fi
for package in *.deb; do dpkg -x "$package" tree; done
for daemon in slurmctld slurmd slurmstepd; do ln -s "$daemon-wlm" "tree/usr/sbin/$daemon"; done
rm -rf "$folder/usr"
mv tree/usr "$folder/usr"
