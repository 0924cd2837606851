# Runs a container with runc in this one. Its root is an overlay in the volume.
set -e
export PATH=/usr/sbin:/usr/bin:/bin
cd /volume
mkdir -p lower/bin upper work bundle/rootfs /run
mount -t tmpfs tmpfs /run
cp /bin/busybox lower/bin
for name in sh echo cat rm ls; do ln -s busybox lower/bin/$name; done
mount -t overlay -o lowerdir=lower,upperdir=upper,workdir=work overlay bundle/rootfs
# The containers of runc are in cgroups below that of this one, which must have no processes itself then.
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mkdir /sys/fs/cgroup/engine
echo $$ > /sys/fs/cgroup/engine/cgroup.procs
cd bundle
runc spec
sed -i -e 's/"terminal": true/"terminal": false/' -e 's/"readonly": true/"readonly": false/' \
  -e 's/"sh"/"sh", "-c", "echo hello > \/file; rm \/bin\/ls; cat \/file; echo \/bin\/*; cat \/proc\/self\/cgroup"/' config.json
runc run inner
