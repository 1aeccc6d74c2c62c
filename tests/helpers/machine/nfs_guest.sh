#!/bin/bash
# The first process of a guest kernel (User-Mode Linux) that has the machine's files, read-only, as its root.
# It serves a directory over NFS 4.2 and mounts it twice: at /mnt/here, and at /mnt/there from "node-there",
# another host with a network of its own, behind the interface veth0. Then it runs $PROGRAM and ends.
# The kernel's command line gives $PACKAGES (unpacked Debian packages), $PYTHON, $PYTHONPATH and $PROGRAM.
export PATH=$PACKAGES/sbin:$PACKAGES/usr/sbin:/usr/sbin:/usr/bin:/sbin:/bin
export LD_LIBRARY_PATH=$PACKAGES/lib/x86_64-linux-gnu:$PACKAGES/usr/lib/x86_64-linux-gnu
mount -t proc none /proc
for place in /run /mnt /var/lib; do mount -t tmpfs none $place; done
mkdir -p /var/lib/nfs/rpc_pipefs /var/lib/nfs/v4recovery /run/lib/modules /mnt/{export,here,there}
touch /var/lib/nfs/{etab,rmtab}
ln -s "$PACKAGES/usr/lib/uml/modules/$(uname -r)" "/run/lib/modules/$(uname -r)"
for module in nfsd nfs nfsv4 veth; do (exec -a modprobe "$PACKAGES/bin/kmod" -d /run $module); done
hostname node-here
ip link set lo up
mount -t nfsd nfsd /proc/fs/nfsd
mount -t rpc_pipefs none /var/lib/nfs/rpc_pipefs
mount -t tmpfs none /mnt/export
echo 15 > /proc/fs/nfsd/nfsv4leasetime   # seconds that the server waits for a client that has failed
echo 10 > /proc/fs/nfsd/nfsv4gracetime
rpc.mountd --no-nfs-version 3
exportfs -i -o rw,no_root_squash,insecure,fsid=0,no_subtree_check '*:/mnt/export'
rpc.nfsd --no-nfs-version 3 --nfs-version 4.2 4
ip link add veth0 type veth peer name eth0
ip addr add 10.9.0.1/24 dev veth0
ip link set veth0 up
unshare --net --uts sleep infinity &
export THERE=$!
until [ "$(readlink /proc/$THERE/ns/net)" != "$(readlink /proc/$$/ns/net)" ]; do sleep 0.1; done
ip link set eth0 netns $THERE
on_there="nsenter --target $THERE --net --uts"
$on_there sh -c 'hostname node-there; ip link set lo up; ip addr add 10.9.0.2/24 dev eth0; ip link set eth0 up'
mount.nfs 127.0.0.1:/ /mnt/here -o vers=4.2,sec=sys
$on_there mount.nfs 10.9.0.1:/ /mnt/there -o vers=4.2,sec=sys
grep nfs4 /proc/mounts
"$PYTHON" "$PROGRAM"
echo "ended with $?"
echo o > /proc/sysrq-trigger
sleep 10
