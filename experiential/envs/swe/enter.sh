# Run as: sh enter.sh LAYERS FOLDER BOX PRIVATE SCRATCH KILOBYTES BLOCKS SECONDS PROGRAM..., with LAYERS namespaces or limits.
# In fresh mount, PID, IPC and network namespaces all is made read-only but FOLDER, which is shown at BOX. PRIVATE (one path a line) is
# hidden; SCRATCH (one path a line) is replaced by an empty folder in memory. With `limits` only the limits and the working folder are set.
set -eu
layers=$1 folder=$2 box=$3 private=$4 scratch=$5 memory=$6 blocks=$7 seconds=$8
shift 8
if [ "$layers" = namespaces ]; then
    mount --make-rprivate /
    mount --bind "$folder" "$box"
    printf '%s\n' "$private" | while IFS= read -r path; do
        if [ -d "$path" ]; then mount -t tmpfs -o size=4k,mode=755 none "$path"; fi
        if [ -f "$path" ]; then mount --bind /dev/null "$path"; fi
    done
    # Of the devices only harmless ones: a user who is root could write to a disk's, since the files are his.
    mount -t tmpfs -o mode=755,size=256m none /dev/shm
    mkdir -m 1777 /dev/shm/shm
    for name in null zero full random urandom; do
        touch "/dev/shm/$name"
        mount --bind "/dev/$name" "/dev/shm/$name"
    done
    ln -s /proc/self/fd /dev/shm/fd
    mount --rbind /dev/shm /dev
    mount -o remount,bind,ro /
    while read -r _ path _; do
        case $path in
        "$box" | /dev | /dev/* | /) ;;
        *) mount -o remount,bind,ro "$(printf '%b' "$path")" 2>/dev/null || true ;;
        esac
    done </proc/mounts
    printf '%s\n' "$scratch" | while IFS= read -r path; do
        if [ -d "$path" ]; then mount -t tmpfs -o mode=1777,size=256m none "$path"; fi
    done
    folder=$box
    set -- setpriv --no-new-privs --bounding-set=-all --inh-caps=-all "$@"
fi
cd "$folder/repo"
ulimit -c 0
ulimit -f "$blocks"
ulimit -t "$seconds"
ulimit -v "$memory" 2>/dev/null || true
exec "$@"
