#!/bin/sh
# Puts the optical digits set into FILE: 1797 images of 8x8 pixels, E. Alpaydin and C. Kaynak, UCI
# Machine Learning Repository, CC BY 4.0. Usage: fetch_digits.sh FILE
#
# It comes from the Debian package python3-sklearn: as installed here, or else downloaded and unpacked
# beside FILE, without being installed. HSDP_DIGITS names a copy (digits.csv or digits.csv.gz) instead.
# Exit status 77: it cannot be had here.
set -eu

file=${1:?usage: fetch_digits.sh FILE}
[ ! -s "$file" ] || exit 0
mkdir -p "$(dirname "$file")"
scratch=$(mktemp -d "$(dirname "$file")/fetch.XXXXXX")
trap 'rm -rf "$scratch"' EXIT
trap 'exit 130' INT TERM
chmod 755 "$scratch"  # apt downloads as a user of its own

download() {
  (cd "$scratch" && apt-get download python3-sklearn >apt.log 2>&1)
}

# A fresh container may have none.
refresh_package_lists() {
  if [ "$(id -u)" -eq 0 ]; then
    apt-get update -qq >>"$scratch/apt.log" 2>&1
  else
    sudo -n apt-get update -qq >>"$scratch/apt.log" 2>&1
  fi
}

source=${HSDP_DIGITS:-/usr/lib/python3/dist-packages/sklearn/datasets/data/digits.csv.gz}
if [ -z "${HSDP_DIGITS:-}" ] && [ ! -r "$source" ] && command -v apt-get >/dev/null 2>&1; then
  echo "fetch_digits: downloading the Debian package python3-sklearn" >&2
  if download || { refresh_package_lists && download; }; then
    dpkg-deb --fsys-tarfile "$scratch"/python3-sklearn_*.deb |
      tar -x -C "$scratch" --wildcards '*/sklearn/datasets/data/digits.csv.gz' || true
    source=$(find "$scratch" -name digits.csv.gz)
  else
    sed 's/^/fetch_digits: /' "$scratch/apt.log" >&2
  fi
fi
if [ ! -r "$source" ]; then
  cat >&2 <<END
fetch_digits: the digits cannot be had: expected ${source:-digits.csv.gz in python3-sklearn}
  With network: apt-get update (as root), then run this again.
  Without: bring sklearn/datasets/data/digits.csv.gz from any copy of scikit-learn and set
  HSDP_DIGITS to its path.
END
  exit 77
fi
case $source in
  *.gz) gzip -dc "$source" >"$scratch/digits.csv" ;;
  *) cat "$source" >"$scratch/digits.csv" ;;
esac
mv "$scratch/digits.csv" "$file"
