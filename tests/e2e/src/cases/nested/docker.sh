# containerd and docker in a container, as in one of the image docker:dind. They end with it.
set -e
export PATH=/usr/sbin:/usr/bin:/bin
# The image has neither.
mkdir -p /run /tmp
mount -t tmpfs tmpfs /run
# The containers of docker are in cgroups below that of this one, which must have no processes itself then.
mkdir /sys/fs/cgroup/engine
echo $$ > /sys/fs/cgroup/engine/cgroup.procs
# dockerd waits 15 seconds for a containerd that it starts itself, which is not enough on an emulated host.
printf 'version = 2\ndisabled_plugins = ["io.containerd.grpc.v1.cri"]\n' > /run/containerd.toml
containerd --config /run/containerd.toml --root /var/lib/docker/containerd --state /run/containerd \
  --address /run/containerd.sock &
until [ -S /run/containerd.sock ]; do sleep 0.1; done
exec dockerd --containerd /run/containerd.sock --host unix:///run/docker.sock
