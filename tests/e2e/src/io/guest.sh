# The init of QEMU's guest: what containerd and an agent do for a container.
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs dev /dev
mkdir /dev/shm
mount -t tmpfs shm /dev/shm
mount -t virtiofs data /data
ip link set lo up
ip addr add $ADDRESS/24 dev eth0
ip link set eth0 mtu $MTU up
