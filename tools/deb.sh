#!/usr/bin/env bash
# One Debian package of the program, the library, its header, manual and completion. Called by
# `make deb` with BUILD, CKPT_VERSION and MAKE. Dependencies are what the binaries link, by the
# packages that own those libraries here.
set -euo pipefail
cd "$(dirname "$0")/.."

arch=$(dpkg --print-architecture)
root=$(mktemp -d "${TMPDIR:-/tmp}/ckpt-deb.XXXXXX")
trap 'rm -rf "$root"' EXIT
chmod 755 "$root"
"${MAKE:-make}" --no-print-directory install BUILD="$BUILD" DESTDIR="$root" PREFIX=/usr \
    LIBDIR="/usr/lib/$(gcc -dumpmachine)"
strip --strip-unneeded "$root/usr/bin/ckpt" "$root"/usr/lib/*/libckpt.so.*.*
strip --strip-debug "$root"/usr/lib/*/libckpt.a
rm -rf "$root/usr/lib/ckpt" # ranks need Open MPI; who wants them builds with it
find "$root/usr/share/man" -name '*.1' -exec gzip -n -9 {} +

# Libraries that the program and the library name themselves; what those need is their packages' matter.
needed() {
    objdump -p "$root/usr/bin/ckpt" "$root"/usr/lib/*/libckpt.so.*.* |
        sed -n 's/^ *NEEDED *//p' | sort -u
}
newest_glibc() { # the newest version of a symbol that they ask of the C library
    objdump -T "$root/usr/bin/ckpt" "$root"/usr/lib/*/libckpt.so.*.* |
        grep -o 'GLIBC_[0-9.]*' | cut -d_ -f2 | sort -V | tail -n 1
}
depends=()
while IFS= read -r so; do
    path=$(ldconfig -p | sed -n "s|^\t$so (.*x86-64.*) => ||p;s|^\t$so (.*AArch64.*) => ||p" | head -n 1)
    [ -n "$path" ] || path=$(ldconfig -p | sed -n "s|^\t$so (.*) => ||p" | head -n 1)
    real=$(readlink -f "$path")
    # Where /lib is a link into /usr, dpkg may know a file by either name.
    owner=$({ dpkg -S "$real" || dpkg -S "${real#/usr}"; } 2>/dev/null | head -n 1 | cut -d: -f1 || true)
    [ -n "$owner" ] || {
        echo "deb.sh: no package owns $so ($path)" >&2
        exit 1
    }
    case $so in libc.so.* | libm.so.*) owner+=" (>= $(newest_glibc))" ;; esac
    depends+=("$owner")
done < <(needed)
# Loaded when it is needed (lib/svd.c). A virtual name: it stands for every build.
depends+=('libopenblas0')
list=$(printf '%s\n' "${depends[@]}" | sort -u | paste -sd, | sed 's/,/, /g')

mkdir "$root/DEBIAN"
cat >"$root/DEBIAN/control" <<END
Package: ckpt
Version: $CKPT_VERSION
Architecture: $arch
Maintainer: ckpt <ckpt@localhost>
Installed-Size: $(du -sk "$root/usr" | cut -f1)
Depends: $list
Section: science
Priority: optional
Description: read, convert, reshard, verify and run model checkpoints
 One program and library for the checkpoints of KDA and MLA hybrids and the
 models around them, between Hugging Face, FLA and Megatron.
END
printf '#!/bin/sh\nset -e\nldconfig\n' >"$root/DEBIAN/postinst"
cp "$root/DEBIAN/postinst" "$root/DEBIAN/postrm"
chmod 755 "$root/DEBIAN/postinst" "$root/DEBIAN/postrm"
file=$BUILD/ckpt_${CKPT_VERSION}_$arch.deb
dpkg-deb --root-owner-group --build "$root" "$file" >/dev/null
echo "$file"
