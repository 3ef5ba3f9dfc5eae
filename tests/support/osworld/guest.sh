#!/bin/bash
# A machine like OSWorld's from inside: user `user` with password `password` in /home/user, GNOME's settings, a session
# bus where OSWorld's tasks look for it, ctrl+alt+t for a terminal. Nothing outside it changes: its root file system is
# an overlay in memory, it sees only its own processes and has no network. OSWorld's published server listens on port
# 5000 inside; FOLDER/5000, FOLDER/9222 and FOLDER/8080 are sockets that lead to these ports.
#
#   unshare --mount --pid --net --fork --kill-child --mount-proc bash guest.sh FOLDER SERVER PYTHON WIDTHxHEIGHT
set -eu

outside() {
    mount -t tmpfs -o size=4g tmpfs /mnt
    local sockets script
    sockets=$(realpath "$1") script=$(realpath "$0")
    cd /mnt
    mkdir upper work guest
    mount -t overlay overlay -o lowerdir=/,upperdir=upper,workdir=work guest
    cd guest
    mount -t proc proc proc
    mount --rbind /dev dev
    mount -t tmpfs tmpfs dev/shm
    mount --rbind /sys sys
    mount -t tmpfs tmpfs run
    mkdir run/sockets
    mount --bind "$sockets" run/sockets
    cp "$script" run/guest.sh
    exec chroot . bash /run/guest.sh inside "$@"
}

account() {
    sed -i '/^[^:]*:[^:]*:1000:/d' /etc/passwd /etc/group
    useradd --uid 1000 --create-home --shell /bin/bash --password "$(openssl passwd -6 password)" user
    echo 'user ALL=(ALL:ALL) ALL' > /etc/sudoers.d/user
    chmod 440 /etc/sudoers.d/user
    mkdir -p /run/user/1000 /run/bin /run/chrome /home/user/server \
        /home/user/{Desktop,Downloads,Documents,Pictures,Videos,Music} /home/user/.config/{openbox,vlc}
    cp -r "$1"/. /home/user/server/
    # Chromium under Chrome's name and with its profile folder, for tasks that start google-chrome and pkill chrome.
    ln -s /usr/lib/chromium/chromium /run/chrome/chrome
    cat > /run/bin/google-chrome <<'END'
#!/bin/sh
exec /run/chrome/chrome --no-sandbox --no-first-run --disable-gpu --password-store=basic \
    --user-data-dir="$HOME/.config/google-chrome" "$@"
END
    chmod 755 /run/bin/google-chrome
    sed 's|<keyboard>|<keyboard><keybind key="C-A-t"><action name="Execute"><command>gnome-terminal</command></action></keybind>|' \
        /etc/xdg/openbox/rc.xml > /home/user/.config/openbox/rc.xml
    printf '[qt]\nqt-privacy-ask=0\n' > /home/user/.config/vlc/vlcrc   # VLC's question at the first start is answered
    # An entry that this display does not ask for: without one python-xlib prints a warning into each program's output.
    xauth -q -f /home/user/.Xauthority add "$(hostname)/unix:0" . 00000000000000000000000000000000
    chown -R user:user /home/user /run/user/1000
    chmod 700 /run/user/1000
}

as_user() {
    setpriv --reuid 1000 --regid 1000 --init-groups --reset-env env \
        "PATH=/run/bin:$(dirname "$PYTHON"):/usr/local/bin:/usr/bin:/bin:/usr/games" DISPLAY=:0 LANG=C.UTF-8 \
        XAUTHORITY=/home/user/.Xauthority XDG_RUNTIME_DIR=/run/user/1000 XDG_SESSION_TYPE=x11 \
        DBUS_SESSION_BUS_ADDRESS=unix:path=/run/user/1000/bus XDG_CURRENT_DESKTOP=ubuntu:GNOME \
        GTK_MODULES=gail:atk-bridge NO_AT_BRIDGE=0 "$@"
}

inside() {
    local server=$2 screen=$4 port
    PYTHON=$3
    [ "$(stat --file-system --format %T /)" = overlayfs ]  # what follows must change nothing outside
    ip link set lo up
    rm -rf /tmp/.X11-unix /tmp/.X*-lock
    account "$server"
    cd /home/user
    as_user Xvfb :0 -screen 0 "${screen}x24" -nolisten tcp &
    as_user dbus-daemon --session --nofork --nopidfile --address=unix:path=/run/user/1000/bus &
    until [ -S /tmp/.X11-unix/X0 ] && [ -S /run/user/1000/bus ]; do sleep 0.05; done
    as_user gsettings set org.gnome.desktop.interface toolkit-accessibility true
    as_user openbox &
    as_user sh -c 'pulseaudio --start && pactl set-sink-volume 0 50%' &
    cd /home/user/server
    as_user "$PYTHON" -m flask --app main run -h 127.0.0.1 -p 5000 &
    for port in 5000 9222 8080; do
        socat "UNIX-LISTEN:/run/sockets/$port,fork" "TCP:127.0.0.1:$port" &
    done
    wait
}

if [ "$1" = inside ]; then shift; inside "$@"; else outside "$@"; fi
